"""The prefix cache: page pool, radix tree, eviction.  numpy only."""
