const unpacked = id => new Response(new Blob([Uint8Array.from(atob(document.getElementById(id).textContent), letter => letter.charCodeAt(0))]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
const style = document.createElement("style");
style.textContent = await unpacked("datatables-style");
document.head.prepend(style);
document.documentElement.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);
const code = new Blob([await unpacked("datatables")], {type: "text/javascript"});
const {default: DataTable} = await import(URL.createObjectURL(code));
const empty = (a, b) => (a === "") - (b === "");
DataTable.type("number", {order: {asc: (a, b) => empty(a, b) || a - b, desc: (a, b) => empty(a, b) || b - a}});
for (const table of document.querySelectorAll("table.interactive")) {
  const headings = [...table.tHead.rows[0].cells], rows = table.tBodies[0].rows.length, long = rows > 60;
  const columns = headings.map((heading, place) => heading.hidden ? {type: "number", visible: false}
    : heading.classList.contains("text") ? {type: "string", columnControl: long ? [["searchList"]] : []}
    : {type: "number", className: place ? "dt-right" : "dt-left"});
  const shown = {columns: ":visible"};
  new DataTable(table, {
    columns, order: [], orderFixed: {pre: [[columns.length - 1, "asc"]]}, autoWidth: false,
    paging: long, pageLength: 50, lengthMenu: [50, 200, {label: "all", value: -1}],
    layout: {
      topStart: "search", topEnd: {buttons: [{extend: "copyHtml5", exportOptions: shown, title: null},
        {extend: "csvHtml5", exportOptions: shown}]},
      bottomStart: long ? "info" : null, bottomEnd: long ? ["pageLength", "paging"] : null,
    },
  });
  // A page may have several long tables, and a landmark needs a name of its own.
  const above = [...document.querySelectorAll("h1, h2")].filter(one => one.compareDocumentPosition(table) & Node.DOCUMENT_POSITION_FOLLOWING);
  for (const pages of table.closest(".dt-container").querySelectorAll("nav")) pages.ariaLabel = `Pages of ${above.at(-1).textContent}`;
  table.style.setProperty("--first", `${table.tHead.rows[0].cells[0].offsetWidth}px`);
}
