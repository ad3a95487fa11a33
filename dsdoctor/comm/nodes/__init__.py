"""Tests nodes in few rounds, each alone, in pairs, in growing groups: which node, or which path between two, is bad or slow."""
