// Runs a page. With ?check its result goes to the server that asked for it.
export async function report(main) {
  const checked = location.search === "?check";
  if (checked) {
    // The page counts as loaded when the server answers, which is after the result has arrived there.
    document.body.append(Object.assign(new Image(), { src: "finished", hidden: true }));
  }
  const result = await main().catch((error) => ({ error: String(error) }));
  if (result.error) document.getElementById("status").textContent = result.error;
  if (checked) await fetch("result", { method: "POST", body: JSON.stringify(result) });
}
