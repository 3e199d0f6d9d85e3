// A value that the browser keeps: area is "localStorage" (for good) or "sessionStorage" (for this tab).
//
// A browser that is told to block storage throws already when the area is looked at. Then the value lasts as long as
// the page, and all else works.

export class Kept {
  constructor(area, key) {
    this.area = area;
    this.key = key;
    this.value = "";
    this.reach((storage) => (this.value = storage.getItem(key) ?? ""));
  }

  set(value) {
    this.value = value;
    this.reach((storage) => (value ? storage.setItem(this.key, value) : storage.removeItem(this.key)));
  }

  reach(use) {
    try {
      use(window[this.area]);
    } catch (error) {
      if (!(error instanceof DOMException)) throw error;
    }
  }
}
