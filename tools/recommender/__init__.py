"""What tools/train.py is made of: data, the click model, its training, and the report."""
