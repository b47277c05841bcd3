"""The exchange: blocks, codes and means."""
