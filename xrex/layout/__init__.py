"""The layout of a table and a batch on a mesh: requirements, handle, explanation and plan."""
