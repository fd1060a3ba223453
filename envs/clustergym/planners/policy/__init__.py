"""The learned policy: exported network, planner and guided search."""
