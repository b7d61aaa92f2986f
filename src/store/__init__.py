"""What is kept on disk: the relay's touches and latches, and the originals of what it shortened."""
