"""Minimum cuts: the cheapest way to split a network between a source and a sink."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

__all__ = ["Network"]


class Network:
    """A directed network whose vertices are any hashable objects.

    Source: E. A. Dinic, *Algorithm for solution of a problem of maximum flow in networks with power estimation*, 1970.
    """

    def __init__(self) -> None:
        self._vertices: dict[Hashable, int] = {}
        self._arcs: list[list[int]] = []  # of each vertex; arc i ^ 1 is the reverse of arc i
        self._heads: list[int] = []
        self._capacities: list[int] = []

    def _vertex(self, key: Hashable) -> int:
        if key not in self._vertices:
            self._vertices[key] = len(self._arcs)
            self._arcs.append([])
        return self._vertices[key]

    def arc(self, tail: Hashable, head: Hashable, capacity: int) -> None:
        """Cutting ``tail`` (on the source's side) from ``head`` costs ``capacity``."""
        u, v = self._vertex(tail), self._vertex(head)
        for vertex, other, room in ((u, v, capacity), (v, u, 0)):
            self._arcs[vertex].append(len(self._heads))
            self._heads.append(other)
            self._capacities.append(room)

    def source_side(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """The vertices that a cheapest cut leaves with the source: the smallest such set."""
        start, end = self._vertex(source), self._vertex(sink)
        while True:
            levels = self._levels(start)
            if levels[end] < 0:
                return {key for key, vertex in self._vertices.items() if levels[vertex] >= 0}
            self._saturate(start, end, levels)

    def _levels(self, start: int) -> list[int]:
        """Distance of each vertex from the start along arcs with room left, -1 where there is no path."""
        levels = [-1] * len(self._arcs)
        levels[start] = 0
        queue = deque([start])
        while queue:
            vertex = queue.popleft()
            for arc in self._arcs[vertex]:
                head = self._heads[arc]
                if levels[head] < 0 and self._capacities[arc]:
                    levels[head] = levels[vertex] + 1
                    queue.append(head)
        return levels

    def _saturate(self, start: int, end: int, levels: list[int]) -> None:
        """Sends flow along shortest paths until none has room."""
        heads, capacities = self._heads, self._capacities
        untried = [list(arcs) for arcs in self._arcs]
        path: list[int] = []
        vertex = start
        while True:
            if vertex == end:
                flow = min(capacities[arc] for arc in path)
                for arc in path:
                    capacities[arc] -= flow
                    capacities[arc ^ 1] += flow
                full = next(i for i, arc in enumerate(path) if not capacities[arc])
                vertex = heads[path[full] ^ 1]
                del path[full:]
            elif untried[vertex]:
                arc = untried[vertex][-1]
                if capacities[arc] and levels[heads[arc]] == levels[vertex] + 1:
                    path.append(arc)
                    vertex = heads[arc]
                else:
                    untried[vertex].pop()
            elif path:
                vertex = heads[path.pop() ^ 1]
                untried[vertex].pop()
            else:
                return
