"""The theory of asynchronous SGD: delay kernels, stability, speed and noise."""
