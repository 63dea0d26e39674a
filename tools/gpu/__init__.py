"""Programs for GPUs: described devices, compiled programs, and what they cost by a model."""
