"""What people look at: a plan as a table and as a picture, a run as a page."""
