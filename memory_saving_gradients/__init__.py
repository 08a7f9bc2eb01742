"""Gradient checkpointing for TensorFlow by rewriting the graph."""
__version__ = "1.0.0"
from memory_saving_gradients.differentiate import gradients
from memory_saving_gradients.plan import last_plan
