"""The proof: for any plan, gradient and metrics equal those of the rows run one by one, without padding or cut."""
