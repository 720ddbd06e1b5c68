"""From rows to a plan: layout, steps, micro-batches, weights."""
