"use strict";
// Redraws the table of differences; the page already holds the first pair.
(function () {
  var releases = JSON.parse(document.getElementById("releases").textContent);
  var one = document.getElementById("one"), two = document.getElementById("two");
  var body = document.querySelector("#difference tbody");
  if (!one || !body) { return; }
  function cell(row, text) { var item = row.insertCell(); item.className = "v"; item.textContent = text; }
  function draw() {
    var a = releases[one.value], b = releases[two.value], seen = {}, keys = [];
    // A release's facts are in the order in which they are told: fingerprint first.
    Object.keys(a).concat(Object.keys(b)).forEach(function (key) { if (!seen[key]) { seen[key] = 1; keys.push(key); } });
    keys.sort(function (x, y) { return x.split(" ")[0] < y.split(" ")[0] ? -1 : x.split(" ")[0] > y.split(" ")[0] ? 1 : x < y ? -1 : 1; });
    body.textContent = "";
    keys.forEach(function (key) {
      if (a[key] === b[key]) { return; }
      var row = body.insertRow();
      cell(row, key.slice(2)); cell(row, key in a ? a[key] : "not set"); cell(row, key in b ? b[key] : "not set");
    });
    if (!body.rows.length) { cell(body.insertRow(), "no difference"); }
  }
  one.addEventListener("change", draw);
  two.addEventListener("change", draw);
})();
