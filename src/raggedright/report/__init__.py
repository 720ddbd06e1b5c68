"""What people look at: a plan as a table in the terminal and as a picture."""
