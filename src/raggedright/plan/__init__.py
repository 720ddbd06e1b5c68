"""From rows to a plan: layout, dealing to steps, packing, levelling, cutting, weights."""
