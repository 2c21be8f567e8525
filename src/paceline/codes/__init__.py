"""Gradient codes: which parts each worker computes, what it sends, and how the sum is decoded."""
