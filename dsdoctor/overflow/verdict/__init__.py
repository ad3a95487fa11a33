"""Frames and replay of all ranks -> the verdict: what went bad first, why, and the evidence for it. Without torch."""
