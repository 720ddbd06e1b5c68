"""The pages and pictures of docs/ that are made from the code: `make pages` writes them, a test says when to."""
