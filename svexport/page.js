// Tables of a page: a click on a heading sorts by it, and above long ones a field keeps the rows that have some words.
"use strict"

const LONG = 8

function value(cell) {
  const text = cell.textContent.trim()
  const number = Number(text.replace(/,/g, "").replace(/^([-+]?)inf$/, "$1Infinity"))
  return text === "" || text === "nan" || Number.isNaN(number) ? text : number
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1
  return a.localeCompare(b, "en", { numeric: true })
}

function sortable(table) {
  const body = table.tBodies[0]
  for (const heading of table.tHead.rows[0].cells) {
    const sort = () => {
      const falling = heading.getAttribute("aria-sort") === "ascending"
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort")
      heading.setAttribute("aria-sort", falling ? "descending" : "ascending")
      const key = row => value(row.cells[heading.cellIndex])
      const rows = [...body.rows].sort((a, b) => compare(key(a), key(b)) * (falling ? -1 : 1))
      body.append(...rows)
    }
    heading.tabIndex = 0
    heading.title = "sort"
    heading.addEventListener("click", sort)
    heading.addEventListener("keydown", event => {
      if (event.key === "Enter") sort()
    })
  }
}

function searchable(table) {
  const rows = [...table.tBodies[0].rows]
  const field = document.createElement("input")
  field.type = "search"
  field.placeholder = `search ${rows.length} rows`
  field.setAttribute("aria-label", field.placeholder)
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/)
    for (const row of rows) {
      const text = row.textContent.toLowerCase()
      row.hidden = !words.every(word => text.includes(word))
    }
  })
  table.parentElement.before(field)
}

for (const table of document.querySelectorAll(".svexport .scroll table")) {
  if (!table.tHead || table.tBodies[0].rows.length < 2) continue
  sortable(table)
  if (table.tBodies[0].rows.length >= LONG) searchable(table)
}
