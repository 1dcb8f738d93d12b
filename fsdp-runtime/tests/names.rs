//! The names that a user's first page shows: few at the root of the crate and in the prelude, and a page of the
//! guide for each module.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use syn::{Item, UseTree, Visibility};

/// Most names at the root of the crate.
const ROOT: usize = 35;
/// Most names in the prelude.
const PRELUDE: usize = 30;
/// Modules without a page: the guide itself, and what a program imports as a whole.
const WITHOUT_PAGE: [&str; 2] = ["guide", "prelude"];

fn parsed(path: &str) -> syn::File {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    syn::parse_file(&text).unwrap_or_else(|error| panic!("{path:?}: {error}"))
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Returns the text of all attributes of an item, docs among them.
fn text(attributes: &[syn::Attribute]) -> String {
    use quote_text::of;
    attributes.iter().map(of).collect()
}

mod quote_text {
    /// Returns the tokens of an attribute as text.
    pub fn of(attribute: &syn::Attribute) -> String {
        match &attribute.meta {
            syn::Meta::List(list) => list.tokens.to_string(),
            syn::Meta::NameValue(pair) => match &pair.value {
                syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => text.value(),
                _ => String::new(),
            },
            syn::Meta::Path(_) => String::new(),
        }
    }
}

fn add_names(tree: &UseTree, names: &mut BTreeSet<String>) {
    match tree {
        UseTree::Path(path) => add_names(&path.tree, names),
        UseTree::Group(group) => group.items.iter().for_each(|tree| add_names(tree, names)),
        UseTree::Name(name) => drop(names.insert(name.ident.to_string())),
        UseTree::Rename(name) => drop(names.insert(name.rename.to_string())),
        UseTree::Glob(_) => panic!("a glob hides how many names there are"),
    }
}

/// Returns the public names of items, without those that the documentation hides.
fn names(items: &[Item]) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for item in items {
        match item {
            Item::Use(item) if is_public(&item.vis) && !text(&item.attrs).contains("hidden") => {
                add_names(&item.tree, &mut names);
            }
            Item::Mod(item) if is_public(&item.vis) && !text(&item.attrs).contains("hidden") => {
                names.insert(item.ident.to_string());
            }
            _ => {}
        }
    }
    names
}

#[test]
fn the_root_and_the_prelude_have_few_names() {
    let root = parsed("src/lib.rs").items;
    // The macro that is exported at the root, wherever it is written.
    let mut at_root = names(&root);
    at_root.insert("unit_types".into());
    assert!(at_root.contains("fully_shard") && at_root.contains("memory"), "{at_root:?}");
    assert!(at_root.len() <= ROOT, "{} names at the root: {at_root:?}", at_root.len());
    let prelude = root.iter().find_map(|item| match item {
        Item::Mod(item) if item.ident == "prelude" => item.content.as_ref(),
        _ => None,
    });
    let in_prelude = names(&prelude.expect("a prelude").1);
    assert!(in_prelude.contains("fsdp_unit"), "{in_prelude:?}");
    assert!(
        in_prelude.len() <= PRELUDE,
        "{} names in the prelude: {in_prelude:?}",
        in_prelude.len()
    );
}

#[test]
fn each_module_names_its_page_of_the_guide() {
    let root = parsed("src/lib.rs").items;
    let modules = root.iter().filter_map(|item| match item {
        Item::Mod(item) if is_public(&item.vis) && !text(&item.attrs).contains("hidden") => {
            Some(item)
        }
        _ => None,
    });
    let mut seen = 0;
    let check = |name: &str, docs: &str| {
        let page = docs.split("crate::guide::").nth(1);
        let page = page.unwrap_or_else(|| panic!("the docs of `{name}` name no page of the guide"));
        let page: String = page.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("docs/{page}.md"));
        assert!(path.is_file(), "`{name}` names the page `{page}`, which does not exist");
    };
    for module in modules {
        let name = module.ident.to_string();
        if WITHOUT_PAGE.contains(&name.as_str()) {
            continue;
        }
        match module.content {
            Some(_) => check(&name, &text(&module.attrs)),
            None => check(&name, &text(&parsed(&format!("src/{name}/mod.rs")).attrs)),
        }
        seen += 1;
    }
    check("config", &text(&parsed("src/options/config/mod.rs").attrs));
    assert!(seen > 10, "{seen} modules");
}
