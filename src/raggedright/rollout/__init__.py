"""Where tokens come from: one protocol for engines, and the local one, which runs the model that trains."""
