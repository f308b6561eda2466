"""Benchmarks of the MX kernels and trainer, and a projection of the MoE layer to machines that were not measured."""
