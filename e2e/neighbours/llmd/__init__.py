"""llm-d's router, built from its Go module with the pins in `module`."""
