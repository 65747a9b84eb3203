"""The scheduler: request life cycle, policies, plans.  process.py is its rim."""
