"""Speed and correctness of the kernels, checked with PyTorch alone: no other tool is needed."""
