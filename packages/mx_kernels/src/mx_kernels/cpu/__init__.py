"""The reference backend: mx_core's definitions behind the ops, on CPU tensors."""
