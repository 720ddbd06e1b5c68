"""From planned rows to tensors: padding rows, collation, and losses as weighted sums."""
