"""A DeepSpeed tree, installed or fetched -> its ops and what each one needs."""
