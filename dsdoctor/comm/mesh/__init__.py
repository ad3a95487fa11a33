"""Who comes and who reaches whom: the store, the blackboard on it, the mesh over plain TCP."""
