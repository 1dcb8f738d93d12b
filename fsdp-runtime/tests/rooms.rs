//! The order of modules: a room uses only rooms that its `ROOMS` file lists above it, and no modules
//! that lie side by side use each other in a circle.
//!
//! A room is a module at the top of a source folder: a file or a folder. A path through a name that a
//! parent module re-exports counts as a use of the module that the name comes from. Test code,
//! `lib.rs` and `main.rs` may use any module.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

/// Names on the way from the root of a crate to a module or an item.
type Names = Vec<String>;

/// Returns the `.rs` files below a folder that hold no test code only.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a source folder can be read") {
        let path = entry.expect("an entry can be read").path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "tests") {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs")
            && path.file_name().is_some_and(|name| name != "tests.rs")
        {
            found.push(path);
        }
    }
    found
}

/// Returns whether attributes leave an item out of builds without tests: `cfg(test)`, alone or in an
/// `all`.
fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        let condition = list.tokens.to_string().replace(' ', "");
        let parts = condition.strip_prefix("all(").and_then(|parts| parts.strip_suffix(')'));
        list.path.is_ident("cfg")
            && parts.unwrap_or(&condition).split(',').any(|part| part == "test")
    })
}

/// Adds the tokens of a macro to a text, without literals: documentation in a macro uses no module.
fn add_code(tokens: TokenStream, text: &mut String) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => {
                text.push(' ');
                add_code(group.stream(), text);
                text.push(' ');
            }
            TokenTree::Literal(_) => text.push(' '),
            TokenTree::Ident(ident) => {
                let follows = text.ends_with([':', '$']);
                text.push_str(if follows { "" } else { " " });
                text.push_str(&ident.to_string());
            }
            TokenTree::Punct(punct) => text.push(punct.as_char()),
        }
    }
}

/// A use of a module or of an item in it.
struct Import {
    module: Names,
    path: Names,
    /// Name by which the module calls it, if it is declared with `use`.
    called: Option<String>,
}

/// The uses in one file whose paths begin with `crate`, `super` or `self`.
struct Imports {
    module: Names,
    found: Vec<Import>,
    /// Modules of test code.
    tests: Vec<Names>,
}

impl Imports {
    fn add(&mut self, path: Names, called: Option<String>) {
        if ["crate", "super", "self"].contains(&path[0].as_str()) && path.len() > 1 {
            self.found.push(Import { module: self.module.clone(), path, called });
        }
    }

    fn add_tree(&mut self, tree: &syn::UseTree, above: &[String]) {
        let below = |name: &syn::Ident| [above, &[name.to_string()]].concat();
        match tree {
            syn::UseTree::Path(path) => self.add_tree(&path.tree, &below(&path.ident)),
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.add_tree(tree, above));
            }
            syn::UseTree::Name(name) if name.ident == "self" => {
                self.add(above.to_vec(), above.last().cloned());
            }
            syn::UseTree::Name(name) => self.add(below(&name.ident), Some(name.ident.to_string())),
            syn::UseTree::Rename(name) => {
                self.add(below(&name.ident), Some(name.rename.to_string()));
            }
            syn::UseTree::Glob(_) => self.add(above.to_vec(), None),
        }
    }

    /// Adds the paths in the arguments of a macro. Paths that begin with `$crate` are left out.
    fn add_tokens(&mut self, tokens: &TokenStream) {
        let mut text = String::new();
        add_code(tokens.clone(), &mut text);
        for word in text.split(|c: char| !c.is_alphanumeric() && !"_:$".contains(c)) {
            self.add(word.trim_end_matches(':').split("::").map(String::from).collect(), None);
        }
    }
}

impl Visit<'_> for Imports {
    fn visit_item(&mut self, item: &syn::Item) {
        let attributes = match item {
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Struct(item) => &item.attrs,
            syn::Item::Use(item) => &item.attrs,
            _ => &Vec::new(),
        };
        if !is_test(attributes) {
            visit::visit_item(self, item);
        } else if let syn::Item::Mod(item) = item {
            self.tests.push([self.module.as_slice(), &[item.ident.to_string()]].concat());
        }
    }

    fn visit_item_mod(&mut self, item: &syn::ItemMod) {
        self.module.push(item.ident.to_string());
        visit::visit_item_mod(self, item);
        self.module.pop();
    }

    fn visit_item_use(&mut self, item: &syn::ItemUse) {
        self.add_tree(&item.tree, &[]);
    }

    fn visit_path(&mut self, path: &syn::Path) {
        let names = path.segments.iter().map(|segment| segment.ident.to_string());
        self.add(names.collect(), None);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &syn::Macro) {
        self.visit_path(&item.path);
        self.add_tokens(&item.tokens);
    }

    fn visit_stmt(&mut self, statement: &syn::Stmt) {
        let attributes = match statement {
            syn::Stmt::Local(local) => &local.attrs,
            syn::Stmt::Expr(syn::Expr::Call(call), _) => &call.attrs,
            syn::Stmt::Expr(syn::Expr::Block(block), _) => &block.attrs,
            _ => &Vec::new(),
        };
        if !is_test(attributes) {
            visit::visit_stmt(self, statement);
        }
    }
}

/// The modules of a source folder, and what they use.
struct Modules {
    modules: BTreeSet<Names>,
    imports: Vec<Import>,
    /// For each name that a module declares with `use`: the path that it stands for.
    names: BTreeMap<Names, Names>,
}

impl Modules {
    fn read(folder: &Path) -> Self {
        let mut found =
            Self { modules: BTreeSet::new(), imports: Vec::new(), names: BTreeMap::new() };
        let mut tests: Vec<Names> = Vec::new();
        for file in sources(folder) {
            let below = file.strip_prefix(folder).expect("a file below the folder");
            let parts = below.iter().map(|part| part.to_string_lossy());
            let mut module: Names =
                parts.map(|part| part.trim_end_matches(".rs").to_string()).collect();
            if module.last().is_some_and(|last| ["mod", "lib", "main"].contains(&last.as_str())) {
                module.pop();
            }
            let text = fs::read_to_string(&file).expect("a source file is text");
            let code = syn::parse_file(&text).expect("a source file is Rust");
            let mut imports =
                Imports { module: module.clone(), found: Vec::new(), tests: Vec::new() };
            imports.visit_file(&code);
            found.modules.insert(module);
            found.imports.extend(imports.found);
            tests.extend(imports.tests);
        }
        let is_test = |module: &Names| tests.iter().any(|test| module.starts_with(test));
        found.modules.retain(|module| !is_test(module));
        found.imports.retain(|import| !is_test(&import.module));
        for Import { module, path, called } in &found.imports {
            if let Some(called) = called {
                let name = [module.as_slice(), std::slice::from_ref(called)].concat();
                found.names.insert(name, absolute(module, path));
            }
        }
        found
    }

    /// Returns the module that has the item of a path from the root.
    fn owner(&self, path: &[String]) -> Names {
        let mut path = path.to_vec();
        // A name may pass through several modules; a wrong guess must not run forever.
        for _ in 0..8 {
            let module = (0..=path.len()).rev().find(|&end| self.modules.contains(&path[..end]));
            let end = module.unwrap_or(0);
            let Some(next) = path.get(..=end) else { return path };
            let Some(full) = self.names.get(next) else { return path[..end].to_vec() };
            path = [full.as_slice(), &path[end + 1..]].concat();
        }
        path
    }

    /// Returns the uses among the modules of each folder: for each module, those beside it that it
    /// uses.
    fn uses(&self) -> BTreeMap<Names, BTreeMap<String, BTreeSet<String>>> {
        let mut uses: BTreeMap<Names, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
        for Import { module, path, .. } in &self.imports {
            let owner = self.owner(&absolute(module, path));
            let common = module.iter().zip(&owner).take_while(|(a, b)| a == b).count();
            if let (Some(from), Some(to)) = (module.get(common), owner.get(common)) {
                let folder = uses.entry(module[..common].to_vec()).or_default();
                folder.entry(from.clone()).or_default().insert(to.clone());
            }
        }
        uses
    }
}

/// Returns the path from the root of a path in a module.
fn absolute(module: &[String], path: &[String]) -> Names {
    let mut full = if path[0] == "crate" { Vec::new() } else { module.to_vec() };
    for name in path {
        match name.as_str() {
            "crate" | "self" => {}
            "super" => drop(full.pop()),
            _ => full.push(name.clone()),
        }
    }
    full
}

/// Returns modules of one folder that use each other in a circle, if there are any.
fn circle(uses: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    let mut left = uses.clone();
    loop {
        let used: BTreeSet<String> = left.values().flatten().cloned().collect();
        let before = left.len();
        // What uses nothing that is left, and what nothing that is left uses, is in no circle.
        let names: BTreeSet<String> = left.keys().cloned().collect();
        left.retain(|name, uses| {
            uses.retain(|other| names.contains(other));
            !uses.is_empty() && used.contains(name)
        });
        if left.is_empty() {
            return None;
        }
        if left.len() == before {
            return Some(left.into_keys().collect());
        }
    }
}

/// Returns every use against the order, every circle, and every room that the order lacks or has in
/// vain.
fn wrong(folder: &Path) -> Vec<String> {
    let order = fs::read_to_string(folder.join("ROOMS")).expect("the folder has an order");
    let lines = order.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    let listed: Vec<Names> = lines
        .filter(|line| !line.is_empty() && *line != "tests")
        .map(|line| line.split('/').map(String::from).collect())
        .collect();
    let place = |room: &Names| listed.iter().position(|known| known == room);
    let modules = Modules::read(folder);
    let mut wrong = Vec::new();
    for (above, uses) in modules.uses() {
        let name = |module: &str| [above.as_slice(), &[module.to_string()]].concat();
        for (from, others) in &uses {
            for to in others {
                let (from, to) = (name(from), name(to));
                if let (Some(own), Some(used)) = (place(&from), place(&to))
                    && used > own
                {
                    wrong.push(format!("`{}` uses `{}` below it", from.join("/"), to.join("/")));
                }
            }
        }
        if let Some(circle) = circle(&uses) {
            let names: Vec<String> = circle.iter().map(|module| name(module).join("/")).collect();
            wrong.push(format!("a circle of {}", names.join(", ")));
        }
    }
    // A folder is listed whole or not at all, but the root.
    let folders: BTreeSet<&[String]> = listed.iter().map(|room| &room[..room.len() - 1]).collect();
    for room in modules.modules.iter().filter(|module| !module.is_empty()) {
        if folders.contains(&room[..room.len() - 1]) && place(room).is_none() {
            wrong.push(format!(
                "`{}` is not in {}",
                room.join("/"),
                folder.join("ROOMS").display()
            ));
        }
    }
    for room in &listed {
        if !modules.modules.iter().any(|module| module.starts_with(room)) {
            wrong.push(format!("`{}` in {} is no room", room.join("/"), folder.display()));
        }
    }
    wrong
}

#[test]
fn modules_use_only_modules_above_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = vec!["src"];
    // A package from crates.io has no workspace around it.
    let others = ["kernels/src", "cli/src", "../fsdp-macros/src"];
    if root.join("../examples").is_dir() {
        folders.extend(others);
    }
    for folder in folders {
        let found = wrong(&root.join(folder));
        assert!(found.is_empty(), "{folder}:\n{}", found.join("\n"));
    }
    let rooms = fs::read_to_string(root.join("src/ROOMS")).expect("an order");
    let code = |line: &&str| !line.trim_start().starts_with('#');
    let rooms = rooms.lines().filter(code).count();
    assert!(rooms <= 16, "{rooms} rooms at the top level");
}

/// An order that the code breaks is found.
#[test]
fn a_use_against_the_order_is_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        fs::write(path, text).expect("written");
    };
    write("ROOMS", "low # first\nboth\nhigh\nhigh/b\nhigh/a\ngone\n");
    write("low.rs", "use crate::{high::Thing, low};\n");
    write("high/mod.rs", "mod a;\nmod b;\npub use self::b::Thing as Other;\n");
    write("high/a.rs", "use crate::low::Thing; // crate::other\nfn f() { call!(super::Other) }\n");
    write("low/text.rs", "rows! { #[doc = \"crate::high\"] /// [`x`](crate::high)\n a }\n");
    write("high/b.rs", "struct Thing(super::super::high::a::A);\n");
    write(
        "both/mod.rs",
        "#[cfg(any(test, unix))]\nmod c;\n#[cfg(all(test, unix))]\nmod e;\nmod d;\n",
    );
    write("both/c.rs", "use super::d::D;\n");
    write("both/d.rs", "use super::c::C;\n");
    write("both/e.rs", "use crate::new;\n");
    write("new.rs", "#[cfg(test)]\nmod tests {\n    use crate::high;\n}\n");
    let found = wrong(folder.path());
    let expected = [
        "`low` uses `high` below it",
        "a circle of both/c, both/d",
        "`high/b` uses `high/a` below it",
        "a circle of high/a, high/b",
        "`new` is not in",
        "`gone` in",
    ];
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.starts_with(expected), "{found:?}");
    }
}
