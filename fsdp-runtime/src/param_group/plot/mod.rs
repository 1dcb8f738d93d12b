//! Charts as SVG, without further crates.
//!
//! `chart` draws stacked areas and lines, whatever they stand for. `memory` says what is drawn.
//!
//! Imports point one way: svg <- chart <- memory.

mod chart;
mod memory;
mod svg;
