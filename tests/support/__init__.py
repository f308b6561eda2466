"""What several test folders share: operands with exact sums, error bounds, an exact oracle."""
