"""The trainer: the same program on every rank; needs torch and transformers (the extra `train`)."""
