"""Walls around a program: what it sees of the file system, which namespaces it has, what it may ask the kernel.

Standard library only: these modules run in processes that are forked a thousand times.
"""
