"""Tests of mechanisms, one module per family, each against an oracle written from the paper."""
