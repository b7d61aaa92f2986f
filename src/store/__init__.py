"""What is kept on disk: conversations and roots as records, the touches and latches of conversations, and the
originals of what was shortened."""
