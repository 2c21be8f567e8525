"""What is sent: vectors written as shorter messages, and what is kept back for the next one."""
