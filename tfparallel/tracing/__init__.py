"""What one replica does, traced once: its operations are made again for the others."""
