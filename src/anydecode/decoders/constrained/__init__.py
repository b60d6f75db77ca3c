"""Decoding under constraints beyond the mask."""
