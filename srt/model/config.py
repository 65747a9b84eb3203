"""The model's configuration as its folder states it, and the check that it is one we compute.   No torch here."""
