"""Projection of the MoE layer's time to machines that were not measured. Everything it prints says "projected"."""
