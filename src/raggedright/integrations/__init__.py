"""raggedright inside other trainers, by their own extension points."""
