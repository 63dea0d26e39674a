"""What every command-line tool is made of: its flags and exit statuses, and paths."""
