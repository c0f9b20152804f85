"""A small language model and its training loop: the example that shows the library at work.

Reading order: ``settings`` (what can be set), ``model``, ``data``, ``loop`` (the training step).
"""
