//! Charts as SVG, and a page as HTML, without further crates.
//!
//! `chart` draws stacked areas, lines and marks, whatever they stand for. `memory` says what is drawn.
//!
//! Imports point one way: svg, frame <- marks <- chart <- memory, areas <- html.

mod areas;
mod chart;
mod frame;
mod html;
mod marks;
mod memory;
mod svg;

pub(crate) use self::areas::stacked_areas;
