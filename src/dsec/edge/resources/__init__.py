"""What an edge hands out and takes back."""
