"""Penstock beside programs of others: their engines under our gateway, our engines under their pickers (`make neighbours`)."""
