"""What several decoding methods share."""
