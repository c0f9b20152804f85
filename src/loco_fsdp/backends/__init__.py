"""The ways to run the two operations: plain PyTorch, loops compiled for the CPU, Triton."""
