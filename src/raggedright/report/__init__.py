"""Reports for people: a plan as a table, JSON and a picture; the events of a run, and its page."""
