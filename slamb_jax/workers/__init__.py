"""Workers on a mesh, or simulated on one device."""
