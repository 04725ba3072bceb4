"""Minimum cuts: the cheapest way to split a network between a source and a sink."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable

__all__ = ["Network"]

UNLIMITED = 1 << 128


class Network:
    """A directed network whose vertices are any hashable objects.

    Source: E. A. Dinic, *Algorithm for solution of a problem of maximum flow in networks with power estimation*, 1970.
    """

    def __init__(self) -> None:
        self._vertices: dict[Hashable, int] = {}
        self._arcs: list[list[int]] = []  # the arcs of each vertex; arc i ^ 1 is the reverse of arc i
        self._heads: list[int] = []
        self._capacities: list[int] = []

    def _vertex(self, key: Hashable) -> int:
        if key not in self._vertices:
            self._vertices[key] = len(self._arcs)
            self._arcs.append([])
        return self._vertices[key]

    def arc(self, tails: Collection[Hashable], heads: Collection[Hashable], capacity: int) -> None:
        """Charges ``capacity`` once if a cut separates any of ``tails`` (source's side) from any of ``heads``."""
        if tails == heads and len(tails) == 2:  # separating two vertices costs the same in either direction
            one, other = map(self._vertex, tails)
            self._arc(one, other, capacity, capacity)
        else:
            self._arc(self._joined(tails, into=True), self._joined(heads, into=False), capacity)

    def _joined(self, keys: Collection[Hashable], into: bool) -> int:
        """A vertex for all keys: on the source's side if any key is (``into``), or only if all are (not ``into``)."""
        vertices = [self._vertex(key) for key in keys]
        if len(vertices) == 1:
            return vertices[0]
        joint = self._vertex(object())
        for vertex in vertices:
            self._arc(*((vertex, joint) if into else (joint, vertex)), UNLIMITED)
        return joint

    def _arc(self, tail: int, head: int, capacity: int, back: int = 0) -> None:
        for vertex, other, room in ((tail, head, capacity), (head, tail, back)):
            self._arcs[vertex].append(len(self._heads))
            self._heads.append(other)
            self._capacities.append(room)

    def source_side(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """The vertices that a minimum cut leaves on the source's side; the smallest such set."""
        start, end = self._vertex(source), self._vertex(sink)
        while True:
            levels = self._levels(start)
            if levels[end] < 0:
                return {key for key, vertex in self._vertices.items() if levels[vertex] >= 0}
            self._saturate(start, end, levels)

    def _levels(self, start: int) -> list[int]:
        """The distance of each vertex from the start along arcs with capacity left; -1 without a path."""
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
        """Sends flow along shortest paths until none has capacity left."""
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
